"""`python -m retrodict`: the command line."""

import sys

from retrodict.cli.main import main

sys.exit(main())
