"""What may happen to the processes of a run, made to happen: by the tests, and by
benchmarks/kills.py.
"""
