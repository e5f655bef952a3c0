#include <math.h>
#include <stdint.h>

/* exp for x <= 0 (and as exact up to 87) after Cephes' expf: relative error below 2e-7; plain arithmetic, so that loops over it vectorise. */
static inline float exp_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t bits; float value; } power = {.bits = ((int32_t)n + 127) << 23};
    return y * power.value;
}
