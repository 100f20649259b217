"""Last module that a fork server of ranks imports: ranks share the objects of the modules before it, which their garbage
collections would otherwise write to and so copy, page by page.
"""

from __future__ import annotations

import gc

gc.collect()
gc.freeze()
