"""`python -m cake` is the `cake` command."""

import sys

from cake.cli import main

sys.exit(main())
