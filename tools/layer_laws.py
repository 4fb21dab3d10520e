"""LAWS: what every folder of the source tree is for, and which others it may use. tools/check_layers.py holds them."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LAWS", "Law"]


@dataclass(frozen=True)
class Law:
    """What a folder (or a single file) is for, and what it may use; `a/*` is all folders below a."""

    sentence: str
    uses: tuple[str, ...] = ()


CORE = "csrc/core/*"
C10D = "csrc/c10d/*"
BASE = ("csrc/core/base",)

# Folder -> its law, from the bottom up. A file of Python's may have a law of its own.
LAWS: dict[str, Law] = {
    # C++ without torch
    "csrc/core/base": Law(
        "checks, names of enumerations, random numbers, parsing of messages, which rank is on which host"
    ),
    "csrc/core/fault": Law("messages and plans of liveness and of the call check", BASE),
    "csrc/core/transport": Law(
        "messages and plans of subset all-reduce and shared windows; racks; what transfers cost", BASE
    ),
    "csrc/core/prague": Law("Prague: who averages with whom, by a generator or a static schedule", BASE),
    "csrc/core/hop": Law("Hop: the graph, the queues and the modes of waiting", BASE),
    "csrc/core/dssync": Law("DS-Sync: rounds of groups", BASE),
    "csrc/core/dear": Law("DeAR: buckets, shards and the tuner of bucket sizes", (*BASE, "csrc/core/transport")),
    "csrc/core/auto": Law(
        "what each way of synchronising gradients takes, and which to choose: costs, a simulator, a search",
        (*BASE, "csrc/core/transport", "csrc/core/dear"),
    ),
    "csrc/core/pipeline": Law(
        "how to cut layers into pipeline stages and in which order these work: tables, simulators, a search",
        (*BASE, "csrc/core/auto"),
    ),
    "csrc/core/kfac": Law(
        "K-FAC: plans, costs, placements, and packed forms of matrices", (*BASE, "csrc/core/transport")
    ),
    "csrc/core/embedding": Law("FIITED: which chunks of a table are resident, and where", BASE),
    # torch.distributed
    "csrc/c10d/threads": Law("worker threads and interruptible waits; knows no tensor and no group", BASE),
    "csrc/c10d/fault": Law(
        "liveness, the call check, the one reason of a failure; may end a group, never moves its data",
        ("csrc/c10d/threads", *BASE, "csrc/core/fault"),
    ),
    "csrc/c10d/transport": Law(
        "point-to-point, subset all-reduce, shared windows, rows of batches; knows no model",
        ("csrc/c10d/fault", "csrc/c10d/threads", *BASE, "csrc/core/transport"),
    ),
    "csrc/c10d/backend": Law(
        "what torch.distributed sees; forwards, and adds only the call of a paper",
        (C10D, CORE),
    ),
    # operators
    "kernels": Law("schemas of the operators, and what their devices share", (*BASE, "csrc/core/embedding")),
    "kernels/cpu": Law("loops of the CPU, the reference of every operator", ("kernels", *BASE, "csrc/core/embedding")),
    "kernels/cuda": Law(
        "kernels of CUDA and their launches, with the CPU's formats of numbers",
        ("kernels", "kernels/cpu", *BASE, "csrc/core/embedding"),
    ),
    "kernels/cuda/stubs": Law("the error that stands in for kernels that were not built"),
    # attached models
    "csrc/ddp/common": Law("what all synchronizers share", (C10D, *BASE)),
    "csrc/ddp/averaging": Law(
        "synchronizers that average parameters in groups: prague, dssync, the generator's service",
        ("csrc/ddp/common", C10D, *BASE, "csrc/core/prague", "csrc/core/dssync"),
    ),
    "csrc/ddp/hop": Law(
        "the synchronizer of hop: mailbox, lines to the neighbours",
        ("csrc/ddp/common", C10D, *BASE, "csrc/core/hop", "kernels/cpu"),
    ),
    "csrc/ddp/dear": Law(
        "the synchronizer of dear: gradients reduced under backward, gathered under forward",
        ("csrc/ddp/common", C10D, *BASE, "csrc/core/dear"),
    ),
    "csrc/ddp/factors": Law(
        "sufficient factors: gradients of Linear layers from the rows of all ranks, beside DDP's all-reduce",
        ("csrc/ddp/common", C10D, *BASE),
    ),
    # K-FAC
    "csrc/kfac/linalg": Law("arithmetic on raw matrices of the CPU", (*BASE, "csrc/core/kfac", "kernels/cpu")),
    "csrc/kfac/base": Law(
        "layers, options, background threads, timers",
        ("csrc/kfac/linalg", "csrc/c10d/threads", *BASE, "csrc/core/kfac"),
    ),
    "csrc/kfac/comm": Law(
        "how K-FAC sends and waits in a group of its own",
        ("csrc/kfac/base", "csrc/kfac/linalg", C10D, *BASE, "csrc/core/kfac", "csrc/core/transport"),
    ),
    "csrc/kfac/factors": Law(
        "Kronecker factors, as a rank collects its own, and as ranks bring them together",
        ("csrc/kfac/comm", "csrc/kfac/base", "csrc/kfac/linalg", *BASE, "csrc/core/kfac", "kernels/cpu"),
    ),
    "csrc/kfac/inverses": Law(
        "from factors to inverses, and how these reach other ranks",
        ("csrc/kfac/factors", "csrc/kfac/comm", "csrc/kfac/base", "csrc/kfac/linalg", *BASE, "csrc/core/kfac"),
    ),
    "csrc/kfac/precondition": Law(
        "from gradients to preconditioned gradients, and how these reach other ranks",
        (
            *("csrc/kfac/factors", "csrc/kfac/comm", "csrc/kfac/base", "csrc/kfac/linalg"),
            *("csrc/c10d/transport", *BASE, "csrc/core/kfac", "kernels/cpu"),
        ),
    ),
    "csrc/kfac/engine": Law(
        "the steps of K-FAC, one after the other",
        (
            *("csrc/kfac/inverses", "csrc/kfac/precondition", "csrc/kfac/factors", "csrc/kfac/comm"),
            *("csrc/kfac/base", "csrc/kfac/linalg", *BASE, "csrc/core/kfac"),
        ),
    ),
    "csrc/python": Law("binds, and does nothing else", ("csrc/ddp/*", "csrc/kfac/*", C10D, CORE)),
    # Python, the compiled modules aside
    "torchext/_version.py": Law("the version"),
    "torchext/_build.py": Law("what was built, and whether it fits the torch that runs"),
    "torchext/errors.py": Law("errors and warnings of our own"),
    "torchext/base": Law("what every folder may use: numbers of others, code that the compiler leaves alone"),
    "torchext/ops.py": Law("operators over lists of tensors", ("torchext/_build.py",)),
    "torchext/options.py": Law("options of the backends", ("torchext/base",)),
    "torchext/backends": Law(
        "names and process groups, one for the other", ("torchext/options.py", "torchext/errors.py", "torchext/base")
    ),
    "torchext/ddp": Law(
        "hooks into DistributedDataParallel and into optimizers: synchronizer, waits, steps, checks of attach",
        ("torchext/backends", "torchext/errors.py", "torchext/base"),
    ),
    "torchext/synchronizer.py": Law("the public name of what attach returns", ("torchext/ddp",)),
    "torchext/elastic": Law(
        "who trains: members, newcomers, joining, the state that a newcomer gets",
        ("torchext/ddp", "torchext/backends", "torchext/options.py", "torchext/_version.py", "torchext/base"),
    ),
    "torchext/decentralized": Law(
        "parameters are averaged: the synchronizers of prague, dssync and hop",
        ("torchext/elastic", "torchext/ddp", "torchext/backends", "torchext/base"),
    ),
    "torchext/dear": Law(
        "gradients are reduced under the backward pass and gathered under the forward pass",
        ("torchext/ddp", "torchext/backends", "torchext/base"),
    ),
    "torchext/nn": Law(
        "embeddings of adaptive width",
        ("torchext/decentralized", "torchext/ddp", "torchext/backends", "torchext/_build.py", "torchext/base"),
    ),
    "torchext/optim": Law(
        "K-FAC",
        (
            *("torchext/dear", "torchext/ddp", "torchext/backends"),
            *("torchext/errors.py", "torchext/_build.py", "torchext/base"),
        ),
    ),
    "torchext/auto": Law(
        "network and model are measured, and ways of synchronising gradients predicted, chosen and applied",
        (
            *("torchext/_attach.py", "torchext/dear", "torchext/ddp", "torchext/backends"),
            *("torchext/errors.py", "torchext/_version.py", "torchext/base"),
        ),
    ),
    "torchext/auto/pipeline": Law(
        "a chain of layers is measured, cut into stages of a pipeline, and handed to torch's pipelines",
        ("torchext/auto", "torchext/_version.py", "torchext/base"),
    ),
    "torchext/auto/__main__.py": Law(
        "the command of auto and of its pipelines", ("torchext/auto", "torchext/auto/pipeline")
    ),
    "torchext/_attach.py": Law(
        "attach: from a backend's name to its synchronizer",
        (
            *("torchext/dear", "torchext/decentralized", "torchext/elastic"),
            *("torchext/ddp", "torchext/backends", "torchext/base"),
        ),
    ),
    "torchext/integrations": Law(
        "training frameworks and untouched scripts, for which attach is called",
        (
            *("torchext/_attach.py", "torchext/synchronizer.py", "torchext/dear", "torchext/decentralized"),
            *("torchext/elastic", "torchext/ddp", "torchext/backends"),
            *("torchext/options.py", "torchext/errors.py", "torchext/base"),
        ),
    ),
    "torchext/run.py": Law(
        "torchext.run, a script on another backend", ("torchext/integrations", "torchext/ddp", "torchext/backends")
    ),
    "torchext/selftest.py": Law("two processes and one group", ("torchext/backends",)),
    "torchext/diagnosis.py": Law(
        "what python -m torchext says", ("torchext/selftest.py", "torchext/_build.py", "torchext/_version.py")
    ),
    "torchext/__init__.py": Law(
        "the public face",
        (
            *("torchext/_attach.py", "torchext/diagnosis.py", "torchext/optim", "torchext/nn", "torchext/dear"),
            *(
                "torchext/auto",
                "torchext/decentralized",
                "torchext/elastic",
                "torchext/synchronizer.py",
                "torchext/ddp",
            ),
            *("torchext/backends", "torchext/options.py", "torchext/ops.py", "torchext/_build.py"),
            "torchext/_version.py",
        ),
    ),
    "torchext/__main__.py": Law("the command", ("torchext/diagnosis.py",)),
}
