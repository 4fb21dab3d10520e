"""What the benchmark scripts share: a network lab, emulated compute, stragglers, a launcher, results.

The scripts in the folders beside this one import it as ``lab``; each puts the folder above on ``sys.path``.
"""
