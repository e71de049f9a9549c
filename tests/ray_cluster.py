"""A Ray cluster of three machines on this one, for as long as stdin is open: run by the fixture ``ray_cluster``.

The head computes nothing, so that whatever computes can be killed. Prints where it is and the pid of every raylet as JSON; a line on stdin
adds another machine, and the same is printed again.
"""

import json
import sys

from ray.cluster_utils import Cluster

SETTINGS = {"num_gpus": 0, "object_store_memory": 80 << 20}


def main() -> None:
    # A dead machine is noticed after two seconds instead of half a minute.
    health = {"health_check_period_ms": 500, "health_check_failure_threshold": 3, "health_check_initial_delay_ms": 0}
    cluster = Cluster(
        initialize_head=True, head_node_args={**SETTINGS, "num_cpus": 0, "include_dashboard": False, "_system_config": health}
    )
    for _ in range(2):
        cluster.add_node(num_cpus=1, **SETTINGS)
    say(cluster)
    for _ in sys.stdin:
        cluster.add_node(num_cpus=1, **SETTINGS)
        say(cluster)
    cluster.shutdown()


def say(cluster: Cluster) -> None:
    raylets = [process.process.pid for node in cluster.list_all_nodes() for process in node.all_processes["raylet"]]
    print(json.dumps({"address": cluster.address, "raylets": raylets}), flush=True)


if __name__ == "__main__":
    main()
