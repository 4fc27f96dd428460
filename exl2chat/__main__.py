"""`python -m exl2chat` is the `exl2chat` command."""

import sys

from exl2chat.cli import main

sys.exit(main())
