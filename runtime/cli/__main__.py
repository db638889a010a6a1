"""``python -m forebay.runtime.cli``: the command line where the script ``forebay`` is not on the path."""

import sys

from forebay.runtime.cli.app import main

sys.exit(main())
