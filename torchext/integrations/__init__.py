"""Training frameworks, and scripts that are not to be touched: ``attach`` is called for them.

Nothing here imports a framework before its user has.
"""
