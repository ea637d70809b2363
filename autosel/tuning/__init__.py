"""The steps `pipeline.tune` strings together, one a file, in the order they are taken:

shortlist -> build -> prove -> contend -> decide -> crossover
"""
