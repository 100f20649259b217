"""Former name of `mega_trainer.launch.elastic`, for launch scripts that earlier versions wrote."""

from __future__ import annotations

import sys

from mega_trainer.launch.elastic import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
