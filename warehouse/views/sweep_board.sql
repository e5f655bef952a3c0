-- The latest decision for every arm of every sweep, with what its run has reached.
-- steps_done: updates done by the arm's run
-- last_pass_rate: pass rate of its last evaluation
SELECT
    a.sweep, a.night, a.rank, a.arm, a.seed, a.decision, a.reason, a.state, a.arm_run_id,
    a.budget, a.spent, a.from_step, a.to_step, s.steps_done, s.last_pass_rate,
    s.a, s.b, coalesce(s.verdict, a.verdict) AS verdict
FROM sweep_arms a
LEFT JOIN run_summary s ON s.run_id = a.arm_run_id
QUALIFY row_number() OVER (PARTITION BY a.sweep, a.arm, a.seed ORDER BY a.night DESC) = 1
ORDER BY a.sweep, a.rank NULLS LAST, a.arm, a.seed;
