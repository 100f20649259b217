"""One run: built, trained step by step, validated, saved and resumed."""
