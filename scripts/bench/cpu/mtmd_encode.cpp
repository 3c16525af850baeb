// Times llama.cpp's encoder of pictures: mtmd_encode MMPROJ WIDTH HEIGHT THREADS RUNS.
//
// Prints a line for each run with its seconds, after one that does not count. Built against a
// checkout of llama.cpp of which libmtmd was built; see bench/engine/pictures.py.
#include "clip-impl.h"
#include "clip.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <vector>

int main(int argc, char **argv) {
    if (argc != 6) {
        return 2;
    }
    clip_context_params settings = {};
    settings.use_gpu = false;
    settings.flash_attn_type = CLIP_FLASH_ATTN_TYPE_ENABLED;
    settings.image_min_tokens = settings.image_max_tokens = -1;
    clip_init_result loaded = clip_init(argv[1], settings);
    if (!loaded.ctx_v) {
        return 1;
    }
    const int width = atoi(argv[2]), height = atoi(argv[3]);
    std::vector<float> pixels((size_t) width * height * 3);
    for (size_t at = 0; at < pixels.size(); at++) {
        pixels[at] = (float) (at % 255) / 127.5f - 1.0f;
    }
    clip_image_f32 picture;
    picture.set_size({width, height}, false, false);
    picture.cpy_buf(pixels);
    const size_t rows = clip_n_output_tokens(loaded.ctx_v, &picture);
    std::vector<float> embeddings(rows * clip_n_mmproj_embd(loaded.ctx_v));
    for (int run = 0; run <= atoi(argv[5]); run++) {
        const auto begin = std::chrono::steady_clock::now();
        if (!clip_image_encode(loaded.ctx_v, atoi(argv[4]), &picture, embeddings)) {
            return 1;
        }
        const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
        if (run > 0) {
            printf("%.6f\n", took.count());
        }
    }
    return 0;
}
