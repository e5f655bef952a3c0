-- The newest sigmoid fit of every run and axis over all held-out prompts: most evaluations used, then most recent (task_fits has those of single tasks).
SELECT
    f.run_id, r.recipe_name, r.seed, f.axis, f.unit, f.method, f.step, f.n_points, f.window_lo, f.window_hi, f.r0, f.a, f.b, f.c_mid,
    f.a_run_lo, f.a_run_hi, f.b_run_lo, f.b_run_hi, f.c_mid_run_lo, f.c_mid_run_hi, f.a_recipe_lo, f.a_recipe_hi, f.confidence,
    f.verdict, f.reason, f.sse, f.at
FROM fits f
LEFT JOIN runs r ON r.run_id = f.run_id
WHERE f.form = 'sigmoid' AND coalesce(f.task, 'all') = 'all'
QUALIFY row_number() OVER (PARTITION BY f.run_id, f.axis ORDER BY f.step DESC, f.at DESC NULLS LAST, f.written_at DESC) = 1;
