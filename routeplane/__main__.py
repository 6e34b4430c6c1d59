"""``python -m routeplane``: the command line."""

import sys

from routeplane.cli.main import main

sys.exit(main())
