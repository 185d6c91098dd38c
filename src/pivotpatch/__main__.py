"""`python -m pivotpatch`, for launchers such as torchrun."""

import sys

from pivotpatch.cli.main import main

sys.exit(main())
