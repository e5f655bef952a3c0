-- One row per run: how far it is, what it reached, what it cost.
-- state: finished (target reached), running (no end written by the last attempt; also after a kill), ended (stopped early), new or imported
-- attempts: attempts started
-- last_reason: how the last attempt ended
-- steps_done: updates done on the surviving line of steps
-- last_step: step of the last evaluation of the holdout
-- last_pass_rate: its pass rate
-- best_pass_rate: highest pass rate of the run; the maximum of noisy values, so read it as optimistic
-- axis: axis of the fit shown: compute where there is one
-- a: A of the latest fit; null unless identified
-- b: B of the latest fit; null unless identified
-- c_mid: C_mid of the latest fit; null unless identified
-- incidents: incidents recorded for the run
-- parent_run_id: run that this one was forked from; null for a run from the beginning
-- parent_step: step of the parent at the fork
-- compute_curve: device-hours of the surviving line, without evaluation
-- The steps are read once, surviving rows by the same rule as in the table, costs from the rows of all attempts.
WITH steps AS (
    SELECT t.run_id, max(t.compute_paid) AS paid,
        max(t.step) FILTER (c.cut IS NULL OR t.step <= c.cut) AS step,
        arg_max(t.compute_curve, row(t.step, coalesce(t.attempt, 0), t.written_at))
            FILTER (c.cut IS NULL OR t.step <= c.cut) AS compute_curve
    FROM raw.train_steps t
    LEFT JOIN raw.attempt_cuts c ON c.run_id = t.run_id AND c.attempt = t.attempt
    GROUP BY t.run_id
), points AS (
    SELECT run_id, max(step) AS step, arg_max(pass_rate, step) AS last_pass_rate, max(pass_rate) AS best_pass_rate,
        arg_max(compute, step) AS compute_curve
    FROM curve WHERE task = 'all' GROUP BY run_id
), evaluated AS (
    SELECT run_id, max(compute_paid) AS paid FROM raw.evaluations GROUP BY run_id
), tries AS (
    SELECT run_id, max(compute_paid) AS paid, count(DISTINCT attempt) AS attempts, max(attempt) AS attempt,
        max(attempt) FILTER (event = 'ended') AS ended, arg_max(reason, attempt) FILTER (event = 'ended') AS reason
    FROM attempts GROUP BY run_id
), trouble AS (
    SELECT run_id, count(*) AS incidents FROM incidents GROUP BY run_id
), fit AS (
    SELECT * FROM latest_fit
    QUALIFY row_number() OVER (PARTITION BY run_id ORDER BY axis <> 'compute', axis) = 1
)
SELECT
    r.run_id, r.recipe_name, r.seed, r.source,
    CASE
        WHEN r.source = 'import' THEN 'imported'
        WHEN steps.step >= r.target_steps THEN 'finished'
        WHEN tries.attempt IS NULL THEN 'new'
        WHEN tries.ended IS NOT DISTINCT FROM tries.attempt THEN 'ended'
        ELSE 'running'
    END AS state,
    coalesce(tries.attempts, 0) AS attempts,
    CASE WHEN tries.ended IS NOT DISTINCT FROM tries.attempt THEN tries.reason END AS last_reason,
    coalesce(steps.step, points.step, 0) AS steps_done, r.target_steps,
    points.step AS last_step, points.last_pass_rate, points.best_pass_rate,
    fit.axis,
    CASE WHEN fit.verdict = 'identified' THEN fit.a END AS a,
    CASE WHEN fit.verdict = 'identified' THEN fit.b END AS b,
    CASE WHEN fit.verdict = 'identified' THEN fit.c_mid END AS c_mid,
    fit.verdict,
    greatest(steps.compute_curve, points.compute_curve) AS compute_curve,
    greatest(steps.paid, evaluated.paid, tries.paid) AS compute_paid, r.compute_unit,
    coalesce(trouble.incidents, 0) AS incidents, r.created_at, r.parent_run_id, r.parent_step
FROM runs r
LEFT JOIN steps ON steps.run_id = r.run_id
LEFT JOIN points ON points.run_id = r.run_id
LEFT JOIN evaluated ON evaluated.run_id = r.run_id
LEFT JOIN tries ON tries.run_id = r.run_id
LEFT JOIN trouble ON trouble.run_id = r.run_id
LEFT JOIN fit ON fit.run_id = r.run_id
ORDER BY r.created_at, r.run_id;
