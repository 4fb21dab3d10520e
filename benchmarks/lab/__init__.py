"""The benchmark lab holds what the scripts share: a network, emulated compute, stragglers, a launcher, results.

The scripts in the folders beside this one import it as ``lab``; each puts the folder above on ``sys.path``.
"""
