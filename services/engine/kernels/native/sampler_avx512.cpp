#define HEADRACE_SAMPLE_ROW sample_row_avx512
#include "sampler_row.h"
