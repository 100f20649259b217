"""How one model is cut over ranks, and the collectives that make the parts compute what the whole would."""
