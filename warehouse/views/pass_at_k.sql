-- pass@k without bias, 1 - C(n-c, k) / C(n, k) (Chen et al. 2021), for k = 1, 2, 4, ... up to the samples, of every evaluation with rows per prompt.
-- benchmark: as in evaluations: holdout, or name and settings
-- k: answers drawn
-- pass_at_k: mean over prompts of the chance that one of k answers is right
-- stderr: standard error over prompts; the samples of a prompt are one cluster
WITH powers AS (SELECT unnest([1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]) AS k),
each AS (
    SELECT p.run_id, p.step, p.benchmark, p.task, w.k,
        CASE WHEN p.samples - p.correct < w.k THEN 1.0 ELSE 1.0 - exp(
            lgamma(p.samples - p.correct + 1) - lgamma(p.samples - p.correct - w.k + 1) - lgamma(p.samples + 1) + lgamma(p.samples - w.k + 1)) END AS chance
    FROM evaluation_prompts p
    JOIN powers w ON w.k <= p.samples
)
SELECT run_id, step, benchmark, task, k, avg(chance) AS pass_at_k, stddev_samp(chance) / sqrt(count(*)) AS stderr, count(*) AS prompts
FROM each
GROUP BY ALL
ORDER BY run_id, benchmark, step, k;
