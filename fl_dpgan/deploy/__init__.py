"""What it takes to run Flower's processes in earnest: certificates, keys, their command lines, and a run followed."""
