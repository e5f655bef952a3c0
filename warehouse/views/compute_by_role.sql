-- Device-hours of every run by role; lost is what was paid beyond the surviving line of steps.
-- generator: device-hours of the generators, busy, surviving steps
-- trainer: device-hours of the trainers, busy, surviving steps
-- idle: device-hours held and idle, surviving steps
-- evaluation: device-hours of the surviving evaluations
-- lost: compute_paid minus the four above: abandoned steps, repeated evaluations, starts
-- unit: cpu-core-hours or gpu-hours
WITH steps AS (
    SELECT run_id, sum(compute_generator) AS generator, sum(compute_trainer) AS trainer, sum(compute_idle) AS idle
    FROM train_steps GROUP BY run_id
), evaluated AS (
    -- Without an attempt: a checkpoint that was asked again, which the run did not pay for.
    SELECT run_id, sum(compute_evaluation) AS evaluation FROM evaluations WHERE attempt IS NOT NULL GROUP BY run_id
)
SELECT
    s.run_id, s.recipe_name,
    coalesce(steps.generator, 0) AS generator, coalesce(steps.trainer, 0) AS trainer, coalesce(steps.idle, 0) AS idle,
    coalesce(evaluated.evaluation, 0) AS evaluation,
    greatest(0, s.compute_paid - coalesce(steps.generator, 0) - coalesce(steps.trainer, 0) - coalesce(steps.idle, 0)
        - coalesce(evaluated.evaluation, 0)) AS lost,
    s.compute_paid, r.compute_unit AS unit
FROM run_summary s
JOIN runs r ON r.run_id = s.run_id
LEFT JOIN steps ON steps.run_id = s.run_id
LEFT JOIN evaluated ON evaluated.run_id = s.run_id
ORDER BY s.run_id;
