/* The formats of weights and caches, and the struct of a linear: a part of appliance_cpu.h. */
#ifndef AP_FORMATS_H
#define AP_FORMATS_H

#include <stdint.h>

/* The elements of a weight or a cache. */
typedef enum {
    AP_F32 = 0,
    AP_F16 = 1,
    AP_BF16 = 2,
    AP_INT8 = 3,
    AP_INT4 = 4,
    AP_SEALED = 5, /* caches only, like the next two: 4 bits, keys by dimension over a block */
    AP_FP8 = 6,    /* E4M3 */
    AP_K8V4 = 7,   /* keys of 8 bits, values of 4; sealed, too */
    AP_NUM_FORMATS = 8, /* of caches */
    AP_E2M1 = 8,   /* weights only, like all below: 4-bit floats */
    AP_INT2 = 9,
    AP_INT3 = 10,
    AP_INT5 = 11,
    AP_INT6 = 12,
    AP_IQ4 = 13, /* 4 bits that name values, see code_values; of GGML's IQ4_NL */
    AP_IQ3_S = 14,
    AP_IQ3_XXS = 15,
    AP_IQ2 = 16, /* 3 bits that name values */
    AP_IQ1 = 17,
} ap_format;

/* Formats of scales besides AP_F16 and AP_F32. A GGML type's scales are stored as in its blocks of
 * 256 inputs: integers of a few bits, times one or two halves (float16) of the block. */
typedef enum {
    AP_SCALES_NONE = 31, /* all are 1: AP_INT8 and AP_CENTERED only, as in factors of adapters */
    AP_E8M0 = 32,      /* a byte: a power of two */
    AP_SCALES_Q2_K = 33,
    AP_SCALES_Q3_K = 34,
    AP_SCALES_Q4_K = 35, /* of Q5_K, too */
    AP_SCALES_Q6_K = 36,
    AP_SCALES_IQ4_XS = 37,
    AP_SCALES_TRELLIS = 38, /* a float of each output; codes are symbols of a trellis */
    AP_SCALES_ODD_32 = 39, /* 2 q + 1 for integers q of 4 bits, times an eighth of the half */
    AP_SCALES_ODD_16 = 40, /* the same of groups of 16 */
} ap_scale_format;

/* Types of GGML whose blocks ap_linear_pack_ggml takes; their numbers are GGML's. Of IQ1 to IQ3 it
 * takes blocks with a code for each weight: a half, nibbles of scales, then 256 nibbles as those of
 * IQ4_XS, or third bits and pairs of bits as those of Q3_K. */
typedef enum {
    AP_GGML_Q5_0 = 6,
    AP_GGML_Q5_1 = 7,
    AP_GGML_Q2_K = 10,
    AP_GGML_Q3_K = 11,
    AP_GGML_Q4_K = 12,
    AP_GGML_Q5_K = 13,
    AP_GGML_Q6_K = 14,
    AP_GGML_IQ2_XXS = 16,
    AP_GGML_IQ2_XS = 17,
    AP_GGML_IQ3_XXS = 18,
    AP_GGML_IQ1_S = 19,
    AP_GGML_IQ4_NL = 20,
    AP_GGML_IQ3_S = 21,
    AP_GGML_IQ2_S = 22,
    AP_GGML_IQ4_XS = 23,
    AP_GGML_IQ1_M = 29,
} ap_ggml_type;

/* The value of an integer weight's code q; scale and offset are per output and group. */
typedef enum {
    AP_CENTERED = 0,   /* w = (q - 8) * scale with 4 bits, (q - 128) * scale with 8, and so on; with
                        * AP_E2M1 twice the code's value, times scale; from AP_IQ4 on its value */
    AP_ADDITIVE = 1,   /* w = q * scale + offset */
    AP_ZERO_POINT = 2, /* w = (q - offset) * scale */
} ap_offset_kind;

/* A weight matrix (out_features, in_features) in tiles of 16 outputs; `in` below is in_features.
 *
 * The last tile is padded with zeros. Codes by format, per tile:
 *   AP_INT4  (in / 8, 16, 4) bytes: byte [k][j][t] holds the codes of output j for inputs
 *            8k + t (low nibble) and 8k + 4 + t (high nibble)
 *   AP_E2M1  the same as AP_INT4: codes of a sign, two bits of exponent and one of mantissa, of
 *            twice the values 0, 0.5, 1, 1.5, 2, 3, 4, 6; AP_CENTERED
 *   AP_INT8  (in / 4, 16, 4) bytes: byte [k][j][t] holds output j, input 4k + t; unsigned
 *   AP_IQ4, AP_IQ3_S, AP_IQ3_XXS  the same as AP_INT4; AP_CENTERED
 *   AP_IQ2, AP_IQ1  the same as AP_INT3; AP_CENTERED
 *   AP_INT2, AP_INT3, AP_INT5, AP_INT6  (in / 32) pieces of up to three planes, one after another:
 *            the lower four bits as in AP_INT4 (not of AP_INT2, AP_INT3);
 *            two bits (2, 16, 4) bytes: bits 2v and 2v + 1 of byte [k][j][t] are of output j, input
 *            16k + 4v + t: the lower ones of AP_INT2 and AP_INT3, the upper ones of AP_INT6;
 *            the uppermost bit of AP_INT3 and AP_INT5 (16, 4) bytes: bit v of byte [j][t] is of
 *            output j, input 4v + t
 *   AP_F32, AP_F16, AP_BF16  (in, 16) elements: element [k][j] is output j, input k
 * With AP_SCALES_TRELLIS (trellis.h) codes of AP_INT2 to AP_INT5 are symbols: 64 outputs, four
 * tiles, are a closed sequence for each input, and there are four tiles of codes also where
 * out_features ends before; inputs are rotated in blocks of 64; scales are (tiles * 16,) float32.
 * Scales and offsets of other integer weights: (tiles, in / group, 16), AP_F16 or AP_F32, or bytes
 * of AP_E8M0. Of a GGML type: (tiles, in / 256) records, which also hold the offsets. A record is
 * the type's integers, (bytes, 16), then its one or two halves, (16,) each.
 */
typedef struct {
    int32_t format;       /* ap_format of the codes */
    int32_t offset_kind;  /* ap_offset_kind */
    int32_t scale_format; /* of scales and offsets: AP_F16, AP_F32 or an ap_scale_format */
    int32_t group;        /* inputs that share a scale: 32, 64 or 128; of AP_E2M1, AP_SCALES_NONE
                           * and some GGML types 16, of others 32; divides in_features */
    int32_t in_features;
    int32_t out_features;
    const void *codes;   /* 64-byte aligned */
    const void *scales;  /* 64-byte aligned; NULL for float formats and AP_SCALES_NONE */
    const void *offsets; /* the same; NULL for AP_CENTERED and where scales are of a GGML type */
    const float *bias;   /* (out_features,), or NULL */
    /* (in_features,), the input of each column of the codes; NULL: in order. Integer formats
     * only. */
    const int32_t *input_order;
    /* (2 + 2 * out_features,): least and most that inputs are clipped to, then least of each
     * output, then most; NULL: none. Of attention and of an MLP without experts only. Linears of
     * one input have the same two, and post norms follow a linear into the stream. */
    const float *bounds;
} ap_linear;

#endif
