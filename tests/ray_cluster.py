"""Run a Ray cluster of three machines on this one while stdin is open, for the fixture ``ray_cluster``.

The head computes nothing, so that a test can kill any machine that computes. It has the dashboard, which
takes jobs. The program prints the addresses and the pid of every raylet as JSON. Each line on stdin adds a
machine, and the JSON is printed again.
"""

import json
import socket
import sys
import tempfile
from pathlib import Path

from ray.cluster_utils import Cluster


def settings() -> dict[str, object]:
    """Return a node's settings; its agent, which takes jobs, must not want the port of another cluster's.

    No process hands the logs of workers to drivers: Cairn asks for none.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return {
            "num_gpus": 0,
            "object_store_memory": 80 << 20,
            "dashboard_agent_listen_port": free.getsockname()[1],
            "include_log_monitor": False,
        }


def main() -> None:
    # A dead machine is noticed after two seconds instead of half a minute.
    health = {
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 3,
        "health_check_initial_delay_ms": 0,
    }
    # Where several Rays run, a job takes for its own the one that a file in its cluster's folder names. In
    # Ray's usual folder that is the last one that started, and a cluster of this kind writes the file nowhere
    # else.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        head = {
            **settings(),
            "num_cpus": 0,
            "include_dashboard": True,
            "dashboard_port": 0,
            "no_monitor": True,  # of the autoscaler
            "temp_dir": folder,
            "_system_config": health,
        }
        # Ray writes a file into its usual folder, too, and does not make that.
        (Path(tempfile.gettempdir()) / "ray").mkdir(exist_ok=True)
        cluster = Cluster(initialize_head=True, head_node_args=head)
        (Path(folder) / "ray_current_cluster").write_text(cluster.address, "utf-8")
        for _ in range(2):
            cluster.add_node(num_cpus=1, **settings())
        say(cluster)
        for _ in sys.stdin:
            cluster.add_node(num_cpus=1, **settings())
            say(cluster)
        cluster.shutdown()


def say(cluster: Cluster) -> None:
    raylets = [
        process.process.pid for node in cluster.list_all_nodes() for process in node.all_processes["raylet"]
    ]
    print(
        json.dumps({"address": cluster.address, "dashboard": cluster.webui_url, "raylets": raylets}),
        flush=True,
    )


if __name__ == "__main__":
    main()
