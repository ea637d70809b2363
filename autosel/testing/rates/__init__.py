"""Error rates of the race's rules: how often they promote a kernel wrongly, on simulated arms of known speed.

`noise` simulates the samples, `studies` counts errors in many races and states their limits, `common` imitates the
rules that other tuners use. docs/method.md has its tables.
"""
