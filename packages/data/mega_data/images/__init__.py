"""Images beside a data set of conversations: where they lie, how they become pixels, and how such a data set is made."""
