"""``python -m monarchfs``: the command."""

import sys

from monarchfs.cli.main import main

sys.exit(main())
