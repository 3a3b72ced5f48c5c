"""Image data: `load` reads one split of a named source, `partition` divides its records among sites.

`site.read_site` reads what a real site's file names.
"""

from fl_dpgan.data.partition import PartitionKind, partition
from fl_dpgan.data.sources import SOURCES, ImageData, Split, load, to_tensor, to_unit, withhold

__all__ = ["SOURCES", "ImageData", "PartitionKind", "Split", "load", "partition", "to_tensor", "to_unit", "withhold"]
