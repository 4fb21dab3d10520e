from torch._C._distributed_c10d import Backend

class InnerBackends:
    """The groups a backend stands on, all of the same ranks in the same order."""

    def __init__(self, *, cpu: Backend, cuda: Backend | None, control: Backend | None) -> None: ...

class DelegatingBackend(Backend):
    """A backend that forwards every collective to its inner backends; see csrc/c10d/delegating_backend.h."""

    def __init__(self, rank: int, size: int, name: str, inner: InnerBackends, options: Backend.Options) -> None: ...
    def abort_with_reason(self, reason: str) -> None: ...
    @property
    def failure(self) -> tuple[int, str]:
        """The rank that the first failure is about (-1: none) and its reason (empty while the group is well)."""

def leave_all(reason: str) -> None: ...
