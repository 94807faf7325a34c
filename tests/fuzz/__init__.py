"""Mutated files for everything that torchrex reads: what is done to them, what they are, and what
may come of it.
"""
