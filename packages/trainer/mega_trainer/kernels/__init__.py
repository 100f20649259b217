"""The one seam to accelerator libraries: only this folder imports them."""
