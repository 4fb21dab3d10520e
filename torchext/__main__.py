"""``python -m torchext``: what is built, whether it fits this machine, and a self-test."""

import sys

from torchext.diagnosis import main

if __name__ == "__main__":
    sys.exit(main())
