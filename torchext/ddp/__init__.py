"""Hooks into DistributedDataParallel and into optimizers, which all synchronizers share."""
