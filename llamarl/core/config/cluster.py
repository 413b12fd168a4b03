"""The config of hosts and processes. These fields and the numbers of ranks decide which rank runs
where (`rank_assignment.py`)."""

from dataclasses import dataclass, field

from llamarl.core.device.names import AUTO
from llamarl.core.fields import DAY_S, Section, choice, number

PLANNED_GPU = "H100-80GB"
"""The kind of GPU that AUTO stands for in forecasts, where no GPU can be asked."""


@dataclass(kw_only=True)
class ClusterConfig(Section):
    """Processes, and the hosts they run on."""

    backend: str = choice("monarch", "inline")
    """monarch: every executor in its own process; inline: all in this one, for debugging."""
    hosts: list[str] = field(default_factory=list)
    """Addresses of the `llamarl worker` daemons, one per host, such as tls://10.0.0.7:24440; none:
    this machine."""
    sites: list[str] = field(default_factory=list)
    """The site of each host, by any name, in the order of the hosts: [here, here, there]. A site is
    hosts that a fast network joins; between sites the link is slow, so a version crosses it once
    and rollouts come back compressed. None: all hosts are at one site."""
    scheduler: str = choice("none", "slurm", "kubernetes")
    """What starts the daemons: none (you; see `hosts`) | slurm | kubernetes; `llamarl launch`
    prints what to submit."""
    num_hosts: int = number(0, least=0, most=65536)
    """Hosts of the run; 0: as many as `hosts` names, or this machine alone."""
    num_gpus_per_host: int = number(8, least=1, most=1024)
    """GPUs of each host that the run may use."""
    gpu: str = AUTO
    """The kind of GPU. auto: whatever card is there; `llamarl plan` then plans for H100-80GB. A
    kind that the planner knows, such as RTX-4090-24GB: a run on CUDA refuses others; a wrong name
    lists them all. A size, such as 24GB: any card with as much memory, and no forecast of times.
    `generator.pools` may name another kind for their own hosts."""
    data_interface: str = ""
    """Network interface of tensor traffic between hosts (gloo, NCCL), which is not encrypted: name
    a trusted one. Empty: loopback, which serves a single host."""
    ca: str = ""
    """PEM file of the certificate authority that signed the certificates of both ends of every
    control connection."""
    certificate: str = ""
    """PEM file of the certificate of the machine that starts the run."""
    private_key: str = ""
    """PEM file of that certificate's private key."""
    trusts_network: bool = False
    """Allow tcp:// addresses: no encryption, and every client that reaches them can run code
    there."""
    threads_per_process: int = number(1, least=1, most=4096)
    """Torch threads of each executor process (monarch only); with more threads in all
    than cores, everything is much slower."""
    liveness_timeout_s: float = number(60.0, least=0.1, most=DAY_S)
    """A process whose event loop answers nothing for this long counts as lost (monarch only); not
    while it starts. With several `sites` a link between them may be broken for as long."""
    start_timeout_s: float = number(3600.0, least=0.1, most=DAY_S)
    """An executor that takes longer to start counts as lost: its processes, its model, its graphs.
    After a tenth of it the log warns. Raise it for a checkpoint that takes longer to read."""

    max_restarts: int = number(10, least=0, most=10**6)
    """When the scorer, a frozen model, another stage's executor or a collector is lost, it alone is
    started again; when the trainer or a storage unit is, all but the generators, from the newest
    checkpoint in the same run. Not more often than this within an hour, together: then the run
    ends. 0: never. A run with consumers outside ends when its trainer is lost (monarch only)."""

    def check(self) -> None:
        num = len(self.hosts)
        must = f"be 0 or the number of cluster.hosts ({num})"
        self.require(self.num_hosts in (0, num) or num == 0, "num_hosts", must)
        must = f"name the site of each of {self.size} hosts"
        self.require(len(self.sites) in (0, self.size), "sites", must)

    @property
    def size(self) -> int:
        """The number of hosts of the run."""
        return self.num_hosts or len(self.hosts) or 1

    @property
    def planned_gpu(self) -> str:
        """The kind of GPU that forecasts are for."""
        return PLANNED_GPU if self.gpu == AUTO else self.gpu

    def name_host(self, index: int) -> str:
        """Return the name by which the processes of a run know a host: its address, if that is
        known."""
        return self.hosts[index] if index < len(self.hosts) else f"host-{index}"
