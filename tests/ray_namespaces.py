"""Run a command on the head of a Ray cluster of three machines, each in its own network namespace.

    unshare --user --map-root-user --net --pid --fork --kill-child --mount-proc python ray_namespaces.py
    COMMAND...

The head computes nothing. One bridge connects the machines. Everything lives in the namespaces that unshare
makes and ends with them, so it needs no other rights and leaves no interface, name or process behind. Ray
keeps its default settings, so nothing helps it to notice a machine that is cut off.
"""

import re
import subprocess
import sys
import tempfile

import psutil

HEAD, PORT = "10.77.0.1", 6379
HEAD_ADDRESS = f"{HEAD}:{PORT}"
OBJECT_STORE_BYTES = 80 << 20
NOT_STARTED = 75
"""The exit code where Ray did not start: it gives a machine 30 seconds, which a busy one may exceed."""


def call(*command: str) -> None:
    subprocess.run(command, check=True, stdout=sys.stderr)


def add_machine(number: int) -> list[str]:
    """Plug a machine into the bridge; return how commands that run on it begin."""
    process = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo ready; exec sleep infinity"], stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    inside = ["nsenter", "--target", str(process.pid), "--net"]
    call(*f"ip link add port{number} type veth peer name eth0 netns {process.pid}".split())
    call(*f"ip link set port{number} master switch up".split())
    call(*inside, "ip", "link", "set", "lo", "up")
    call(*inside, *f"ip address add 10.77.0.{number}/24 dev eth0".split())
    call(*inside, "ip", "link", "set", "eth0", "up")
    return inside


def start(temporary: str) -> None:
    call("ip", "link", "set", "lo", "up")
    call("ip", "link", "add", "switch", "type", "bridge")
    call(*f"ip address add {HEAD}/24 dev switch".split())
    call("ip", "link", "set", "switch", "up")
    ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--num-gpus=0"]
    ray.append(f"--object-store-memory={OBJECT_STORE_BYTES}")
    head = f"--head --node-ip-address={HEAD} --port={PORT} --num-cpus=0 --include-dashboard=false"
    call(*ray, *head.split(), "--disable-usage-stats", f"--temp-dir={temporary}")
    for number in (2, 3):
        machine = f"--address={HEAD_ADDRESS} --node-ip-address=10.77.0.{number} --num-cpus=1"
        call(*add_machine(number), *ray, *machine.split())


def cut_off_oldest(class_name: str) -> None:
    """Cut the link of the machine of the oldest actor.

    A disabled port drops every frame, both ways, and closes no connection.
    """
    actors = [
        process for process in psutil.process_iter() if process.name().startswith(f"ray::{class_name}"[:15])
    ]
    raylet = " ".join(min(actors, key=psutil.Process.create_time).parent().cmdline())
    number = re.search(r"--node_ip_address=10\.77\.0\.(\d)", raylet).group(1)
    call("bridge", "link", "set", "dev", f"port{number}", "state", "disabled")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="ray-") as temporary:
        try:
            start(temporary)
        except subprocess.CalledProcessError:
            sys.exit(NOT_STARTED)
        code = subprocess.run(sys.argv[1:], check=False).returncode
    sys.exit(code)
