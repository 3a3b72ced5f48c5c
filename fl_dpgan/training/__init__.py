"""Training without Flower: a site's private update of D, and the server's update of G."""
