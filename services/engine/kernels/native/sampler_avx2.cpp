#define HEADRACE_SAMPLE_ROW sample_row_avx2
#include "sampler_row.h"
