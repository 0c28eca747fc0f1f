import pytest
from world import JobFailed

JOBS = "tests/dist_jobs/world_jobs.py"


@pytest.mark.parametrize("size", [1, 3])
def test_workers_meet_in_a_group_of_their_own(world, size):
    assert world.run(JOBS, "add_ranks", size, {"plus": 1}) == [size * (size + 1) // 2] * size


def test_an_exception_in_a_worker_reaches_the_test(world):
    with pytest.raises(JobFailed, match="rank one objects"):
        world.run(JOBS, "fail_on_one", 2)
    assert world.run(JOBS, "add_ranks", 2) == [1, 1]


def test_a_hanging_worker_is_ended_and_the_next_job_works(world):
    with pytest.raises(JobFailed, match=r"ranks \[1\] did not answer"):
        world.run(JOBS, "hang", 2, timeout_s=2)
    assert world.run(JOBS, "add_ranks", 2) == [1, 1]
