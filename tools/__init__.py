"""What the build and the Makefile use; not part of the package."""
