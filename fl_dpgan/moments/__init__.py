"""Moment releases: public features of an image, a site's noised sums of them, and what G is trained on with them."""
