-- The newest sigmoid fit of every run, axis and task: most evaluations used, then most recent.
-- task: task that the curve is of; 'all' for all held-out prompts
SELECT
    f.run_id, r.recipe_name, r.seed, coalesce(f.task, 'all') AS task, f.axis, f.unit, f.method, f.step, f.n_points, f.window_lo, f.window_hi,
    f.r0, f.a, f.b, f.c_mid, f.a_run_lo, f.a_run_hi, f.b_run_lo, f.b_run_hi, f.c_mid_run_lo, f.c_mid_run_hi, f.a_recipe_lo, f.a_recipe_hi,
    f.confidence, f.verdict, f.reason, f.sse, f.at
FROM fits f
LEFT JOIN runs r ON r.run_id = f.run_id
WHERE f.form = 'sigmoid'
QUALIFY row_number() OVER (
    PARTITION BY f.run_id, f.axis, coalesce(f.task, 'all') ORDER BY f.step DESC, f.at DESC NULLS LAST, f.written_at DESC) = 1;
