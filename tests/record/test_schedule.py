"""Which steps are sampled."""

from tenterhook.record.schedule import IN_TRUTH, Schedule


def run(schedule, steps, *, step=1.0, cost=0.5, found=()):
    """The steps that are sampled, where each takes so long and a sample so much of it."""
    sampled = []
    for number in range(steps):
        wanted = schedule.wants(number)
        if wanted:
            sampled.append(number)
        schedule.paid(number, step + (cost if wanted else 0), cost / IN_TRUTH if wanted else 0, wanted)
        if number in found:
            schedule.found(number)
    return sampled


def test_all_of_the_first_then_every_tenth():
    assert run(Schedule(), 60) == [*range(20), 20, 30, 40, 50]


def test_every_step():
    assert run(Schedule(every=1), 30) == list(range(30))


def test_dense_again_after_a_finding():
    assert run(Schedule(dense=4), 60, found=[30]) == [0, 1, 2, 3, 10, 20, 30, 31, 40, 50]
    assert run(Schedule(), 60, found=[30]) == [*range(20), 20, *range(30, 40), 40, 50]


def test_under_a_budget_the_cost_stays_below_it_after_the_start():
    schedule = Schedule(budget=0.03)
    sampled = run(schedule, 2000)
    later = [number for number in sampled if number >= 20]
    assert 100 <= len(later) <= 2000 * 0.03 / 0.5 + 3  # a sample may come before it is paid for
    assert schedule.passed_over > 0
    assert all(number % 10 == 0 for number in later)


def test_a_cheap_recorder_samples_as_often_as_it_may():
    assert run(Schedule(budget=0.03), 1000, cost=0.001) == run(Schedule(), 1000)


def test_some_steps_are_sampled_whatever_that_costs():
    later = [number for number in run(Schedule(budget=0.001), 1000, cost=5.0) if number >= 20]
    assert later == list(range(70, 1000, 50))


def test_a_finding_is_worth_going_over_the_budget():
    sampled = run(Schedule(budget=0.001), 400, found=[300])
    assert set(range(301, 310)) <= set(sampled)
