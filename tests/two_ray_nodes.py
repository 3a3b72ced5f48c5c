"""A Ray cluster of two nodes with one CPU each on this machine, for as long as stdin is open.

Prints its address; to every line that it reads it answers whether both nodes live, the calls that simulated sites have
had on each node, and the ids of the processes that hold sites now.
Ray binds the nodes' processes to this one: they end with it, however it ends. Nothing outside RAY_TMPDIR is written.
"""

import json
import sys
from collections import Counter
from typing import Any

from ray.cluster_utils import Cluster


def state(cluster: Cluster) -> dict[str, Any]:
    """What is known of the nodes and of the sites' actors; the table of actors keeps those that have ended."""
    actors = cluster.global_state.actor_table(None)
    events = [event for found in cluster.global_state.profile_events().values() for event in found]
    # a task's id ends with its actor's
    called = [e["extra_data"]["task_id"][16:] for e in events if e["event_type"] == "task::ClientAppActor.run"]
    return {
        "alive": cluster.remaining_processes_alive() and len(cluster.global_state._live_node_ids()) == 2,
        "calls": Counter(actors[actor]["Address"]["NodeID"] for actor in called),
        "processes": [actor["Pid"] for actor in actors.values() if actor["State"] == "ALIVE"],
    }


if __name__ == "__main__":
    cluster = Cluster()
    for _ in range(2):
        cluster.add_node(num_cpus=1, include_dashboard=False)
    print(cluster.address, flush=True)
    for _ in sys.stdin:
        print(json.dumps(state(cluster)), flush=True)
    cluster.shutdown()
