"""What the benchmark scripts share: a network lab, emulated compute, stragglers, a launcher, results.

The scripts in the folder above import it as ``lab`` (a script's own folder is on ``sys.path``).
"""
