"""The hooks on a few parameters that tell of backward passes, in steps that are not sampled too.

For most models one on the last parameter is enough. Where a pass goes by it, all parameters get one until the optimizer
steps again: it notes which passes come by. The parameter that most of them reach, such as a trunk's, keeps its own.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from tenterhook.platform.checkpoints import graph_task
from tenterhook.record.hooks import guarded

_PASSES = 64  # after which those on all parameters are taken away, if their optimizer has not stepped again


class Sentinels:
    """Which parameters have one."""

    def __init__(self, recorder: Any) -> None:
        self.scouting: Any = None  # for whom all parameters have one, for a while
        self.watched: set[int] = set()  # the backward passes since then that come by those that stay
        self.reached: dict[int, list[int]] = {}  # by pass: the ids of parameters, in the order of their gradients
        self._recorder = recorder
        self._posts: dict[int, RemovableHandle] = {}  # by the id of a parameter
        self._scouts: list[RemovableHandle] = []
        self._before = 0  # how many posts there were when these were put there
        self._late = False  # whether their optimizer has stepped since

    def handles(self) -> list[RemovableHandle]:
        """Of all that there are."""
        return [*self._posts.values(), *self._scouts]

    def post(self, parameters: Iterable[Tensor]) -> None:
        """Put one on each of these that has none."""
        alive = {key: handle for key, handle in self._posts.items() if handle.hooks_dict_ref() is not None}
        for parameter in parameters:
            if id(parameter) not in alive and _gets_gradients(parameter):
                alive[id(parameter)] = parameter.register_post_accumulate_grad_hook(_Sentinel(self._recorder, self))
        self._posts = alive

    def scout(self, parameters: Iterable[Tensor], whom: Any) -> None:
        """Put one on all of these, until this optimizer steps again."""
        self.scouting, self._before, self._late = whom, len(self._posts), False
        hook = _Scout(self._recorder, self)
        self._scouts = [p.register_post_accumulate_grad_hook(hook) for p in parameters if _gets_gradients(p)]

    def settle(self, parameters: Iterable[Tensor], whom: Any, is_watched: bool) -> bool:
        """Keep those that passes came by which no other has seen; one that many passes reach is better than many.

        True if it is time, and there was none. It is not yet if all passes of this step are watched anyway, and were
        before: the one that went by may be that of a head which has its turn only now and then.
        """
        unseen = {task: ids for task, ids in self.reached.items() if task not in self.watched}
        self._late |= whom is self.scouting
        waits = is_watched and not unseen and len(self._posts) == self._before
        if len(self.reached) < _PASSES and (waits or not self._late):
            return False
        often = Counter(key for ids in self.reached.values() for key in ids)
        at = {id(parameter): parameter for parameter in parameters}
        posts = len(self._posts)
        while unseen:
            here = Counter(key for ids in unseen.values() for key in ids if key in at)
            if not here:
                break
            # The last ones of a pass belong to the first layers, which the other passes are likely to reach as well.
            order = {key: i for ids in unseen.values() for i, key in enumerate(ids)}
            best = max(here, key=lambda key: (here[key], often[key], order[key]))
            self.post([at[best]])
            unseen = {task: ids for task, ids in unseen.items() if best not in ids}
        for handle in self._scouts:
            handle.remove()
        self._scouts, self.scouting = [], None
        self.reached.clear()
        self.watched.clear()
        return len(self._posts) == posts


class _OnParameter:
    def __init__(self, recorder: Any, sentinels: Sentinels) -> None:
        self.recorder = recorder
        self._sentinels = sentinels


class _Sentinel(_OnParameter):
    """On a parameter that gets a gradient: there was a backward pass, sampled or not."""

    @guarded
    def __call__(self, parameter: Tensor) -> None:
        task = graph_task()
        self.recorder.micro.watched.add(task)
        if self._sentinels.scouting is not None:
            self._sentinels.watched.add(task)
        self.recorder.saw_backward()


class _Scout(_OnParameter):
    """On all parameters, for a while: which backward passes come by?"""

    @guarded
    def __call__(self, parameter: Tensor) -> None:
        if self._sentinels.scouting is not None:
            self._sentinels.reached.setdefault(graph_task(), []).append(id(parameter))
            self.recorder.saw_backward()


def _gets_gradients(parameter: Tensor) -> bool:
    return parameter.is_leaf and parameter.requires_grad
