-- The scaling curve: held-out pass rate against compute, one row per evaluation of the holdout and task; task 'all' is every held-out prompt together.
-- task: 'all', or one task of a mixture; a run with one task has only 'all' (its name stands in evaluations)
-- compute: device-hours on the surviving line of steps (compute_curve), the axis of fits
SELECT
    e.run_id, r.recipe_name, r.seed,
    CASE WHEN min(e.task) OVER (PARTITION BY e.run_id) IS NOT DISTINCT FROM max(e.task) OVER (PARTITION BY e.run_id)
        THEN 'all' ELSE e.task END AS task,
    e.step,
    e.compute_curve AS compute, e.compute_paid, e.tokens_total, e.flops,
    e.pass_rate, e.stderr, e.prompts, e.samples, e.entropy, e.truncated_share, e.policy_version
FROM evaluations e
LEFT JOIN runs r ON r.run_id = e.run_id
WHERE e.benchmark = 'holdout'
ORDER BY e.run_id, e.task <> 'all', e.task, e.step;
