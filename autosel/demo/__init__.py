"""A real model: fetch SmolLM2-135M-Instruct, tune it, measure it, and answer a question with both arms.

show (the flow): fetch -> convert -> tune -> measure -> answer -> certify
"""
