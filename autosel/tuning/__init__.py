"""The steps of `pipeline.tune`, one per file, in this order:

shortlist -> prove (and build) -> contend -> decide -> crossover
"""
