// Loss and learning rate, over the same steps as the matrix.

import { px } from "./data.ts";
import { useMemo } from "preact/hooks";
import UPlot from "uplot";
import type { Losses as Table } from "./answers.ts";
import { Chart, colour, type Line } from "./chart.tsx";

interface Props {
  tables: { name: string; table: Table }[];
  from: number; to: number; left: number; right: number;
  cursor: number | null;
  onWindow: (from: number, to: number) => void;
  onReset: () => void;
  onHover: (step: number | null) => void;
}

export function Losses({ tables, ...rest }: Props) {
  const look = document.documentElement.dataset.theme;
  const made = useMemo(() => {
    const joined = UPlot.join(tables.map(({ table }) => [table.step, table.loss, table.low, table.high, table.rate] as UPlot.AlignedData));
    const column = (k: number, i: number): (number | null)[] => (joined[1 + 4 * k + i] as (number | null | undefined)[]).map((v) => v ?? null);
    const lines: Line[] = tables.flatMap(({ name }, k) => {
      const strong = colour(k ? "--second" : "--accent");
      return [
        { name: `${name} lowest`, colour: "transparent", values: column(k, 1), width: 0 },
        { name: `${name} highest`, colour: "transparent", values: column(k, 2), width: 0 },
        { name: `${name} loss`, colour: strong, values: column(k, 0) },
        { name: `${name} rate`, colour: colour("--rate"), values: column(k, 3), scale: "rate", dash: k ? [2, 3] : [5, 3], width: 1 },
      ];
    });
    const bands = tables.map((_, k): [number, number, string] => [4 * k + 2, 4 * k + 1, colour(k ? "--second-soft" : "--accent-soft")]);
    return { steps: joined[0] as number[], lines: lines.some((l) => l.scale && l.values.some((v) => v !== null)) ? lines : lines.filter((l) => !l.scale), bands };
  }, [tables, look]);
  if (!made.steps.length)
    return <div class="empty small"><p>No loss so far: it is seen in each <code>backward()</code>.</p></div>;
  const withRate = made.lines.some((line) => line.scale);
  return (
    <div class="losses">
      <p class="key" style={px({ paddingLeft: rest.left < 180 ? 10 : rest.left, paddingRight: 10 })}>
        {tables.map(({ name }, k) => <span title={name}><i style={px({ background: `var(${k ? "--second" : "--accent"})` })} />loss{tables.length > 1 ? ` · ${name}` : ""}</span>)}
        {withRate && <span><i class="dashed" />learning rate</span>}
      </p>
      <Chart {...made} bands={withRate ? made.bands : []} height={116} label="loss and learning rate over steps" {...rest} />
    </div>
  );
}
