// Snapshots: the first channels of a feature map, or the heads of an attention map, as a grid.

import { useEffect, useMemo, useRef } from "preact/hooks";
import { load, type Picture as Snapshot, type Run, type Where } from "./answers.ts";
import { MAGENTA, mixed } from "./colours.ts";
import { useAnswer } from "./data.ts";
import { key, type Node } from "./tree.ts";
import { number } from "./text.ts";

interface Props { run: Run; where: Where; node: Node | null; cursor: number | null; onSelect: (key: string) => void }

export function Pictures({ run, where, node, cursor, onSelect }: Props) {
  const known = run.pictures ?? [];
  if (!known.length)
    return <div class="empty"><p>This run has no pictures.</p><p>Record some: <code>tenterhook run --snapshots 8 train.py</code> keeps eight small copies of feature maps and attention maps over the training.</p></div>;
  const sites = [...new Set(known.map((one) => key(one.model, one.site)))];
  const chosen = node && sites.includes(node.key) ? node.key : sites[0]!;
  const mine = known.filter((one) => key(one.model, one.site) === chosen);
  const near = cursor ?? Infinity;
  const at = mine.filter((one) => one.step <= near).pop() ?? mine[0]!;
  return (
    <div class="pictures">
      <p>
        <select aria-label="site" value={chosen} onChange={(event) => onSelect(event.currentTarget.value)}>{sites.map((site) => <option value={site}>{site}</option>)}</select>
        {" "}{mine.length} over time
      </p>
      {mine.map((one) => <Grid key={one.file} picture={one} where={where} large={one === at} />)}
    </div>
  );
}

function Grid({ picture, where, large }: { picture: Snapshot; where: Where; large: boolean }) {
  const asked = useAnswer(() => load(`picture/${picture.file}`, where), [picture.file, where.run, where.rank]);
  const canvas = useRef<HTMLCanvasElement | null>(null);
  const [channels, high, wide] = picture.shape as [number, number, number];
  const found = useMemo(() => {
    if (!asked.data) return null;
    const bytes = new Uint8Array(asked.data);
    const line = bytes.indexOf(10);
    return { ...(JSON.parse(new TextDecoder().decode(bytes.slice(0, line))) as { low: number; high: number }), shades: bytes.subarray(line + 1) };
  }, [asked.data]);
  const across = Math.ceil(Math.sqrt((channels * high) / wide) * 1.4) || 1;
  const down = Math.ceil(channels / across);
  useEffect(() => {
    const board = canvas.current;
    if (!board || !found) return;
    board.width = across * (wide + 1) - 1;
    board.height = down * (high + 1) - 1;
    const image = new ImageData(board.width, board.height);
    for (let c = 0; c < channels; c++)
      for (let y = 0; y < high; y++)
        for (let x = 0; x < wide; x++) {
          const shade = found.shades[(c * high + y) * wide + x]!;
          const at = 4 * ((Math.floor(c / across) * (high + 1) + y) * board.width + (c % across) * (wide + 1) + x);
          const [r, g, b] = shade < 255 ? mixed("size", shade / 254) : MAGENTA;
          image.data.set([r, g, b, 255], at);
        }
    board.getContext("2d")!.putImageData(image, 0, 0);
  }, [found]);
  return (
    <figure class={large ? "now" : ""}>
      {asked.error ? <p class="error">{asked.error}</p> : <canvas ref={canvas} role="img" aria-label={`${picture.site} at step ${picture.step}`} />}
      <figcaption>step {picture.step.toLocaleString("en-US")} · {picture.what} · {channels} of {high}×{wide}{found && ` · ${number(found.low)} to ${number(found.high)}`}</figcaption>
    </figure>
  );
}
