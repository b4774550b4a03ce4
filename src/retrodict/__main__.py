"""`python -m retrodict`: the command line."""

import sys

from retrodict.cli import main

sys.exit(main())
