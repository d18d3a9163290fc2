"""Which steps are sampled: all of the first, then every N-th, all again after a finding; fewer under a budget."""

_RARELY = 5  # times as seldom as asked for, a step is sampled whatever it costs
IN_TRUTH = 1.8  # times what our own clock says: the training finds cold caches, and shares its memory's bandwidth


class Schedule:
    """Say which steps to sample. With a budget, one is passed over while the cost so far is above that share.

    The steps that are dense, at the start and after a finding, are beside the budget: there are few of them.
    """

    def __init__(self, every: int = 10, dense: int = 20, budget: float | None = None) -> None:
        self.every = every
        self.dense = dense
        self.budget = budget
        self.passed_over = 0
        self._dense_until = self._sampled = dense
        self._spent = self._time = 0.0
        self._last_cost = self._last_step = 0.0

    def wants(self, step: int) -> bool:
        """Whether a step is to be sampled."""
        if step < self._dense_until:
            return True
        if step % self.every:
            return False
        soon = self._time + self.every * self._last_step  # by the next sample
        over = self.budget is not None and self._spent + self._last_cost > self.budget * soon
        if over and step - self._sampled < _RARELY * self.every:
            self.passed_over += 1
            return False
        self._sampled = step
        return True

    def paid(self, step: int, seconds: float, spent: float, sampled: bool) -> None:
        """A step took so long, of which recording took a part by its own clock."""
        spent *= IN_TRUTH
        self._last_cost = spent if sampled else self._last_cost
        self._last_step = max(seconds - spent, 0.0)
        if step >= self._dense_until:
            self._time += seconds
            self._spent += spent

    def found(self, step: int) -> None:
        """After a finding the next steps are all of interest."""
        self._dense_until = max(self._dense_until, step + self.dense // 2)
