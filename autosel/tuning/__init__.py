"""The steps `pipeline.tune` strings together, one a file, in the order they are taken:

shortlist -> prove (and build) -> contend -> decide -> crossover
"""
